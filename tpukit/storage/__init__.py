"""Images on disk: packed records, a cache of decoded pixels, TFRecord files."""
