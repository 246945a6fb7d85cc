"""Why is a run slow? Reports, recompiles and profiles; each takes a backend."""
