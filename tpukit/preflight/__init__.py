"""Know what a TPU will do with a step, without a TPU: the real step, compiled by the TPU's own compiler."""
