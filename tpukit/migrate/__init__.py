"""A linter for old notebooks: names of torch_xla and of related libraries that have changed."""

from tpukit.migrate.linting import LintReport, lint
from tpukit.migrate.name_checks import NameFinding

__all__ = ["LintReport", "NameFinding", "lint"]
