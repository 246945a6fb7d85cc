"""A proof: what a machine was shown to do with this kit, part by part, in one line of JSON."""
