"""One cell's Python, rewritten by all rules."""

from tpukit.migrate.import_rules import ImportRules
from tpukit.migrate.old_calls import OldCalls
from tpukit.migrate.statement_rules import StatementRules


class Rewriting(OldCalls, ImportRules, StatementRules):
    """Rewrites one cell and tells of it in the book's rows; what it leaves is left as it was written."""
