"""A linter for old notebooks: names of torch_xla and of libraries beside it that are not what they were."""

from tpukit.migrate.linting import LintReport, lint
from tpukit.migrate.name_checks import NameFinding

__all__ = ["LintReport", "NameFinding", "lint"]
