"""A proof: what a machine was shown to do with tpukit, part by part, in one line of JSON."""
