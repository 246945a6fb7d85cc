"""Old notebooks, rewritten to run today; what only a person can decide is named with its line."""

from tpukit.migrate.migrated import Migrated, migrate
from tpukit.migrate.old_rank import on_old_rank

__all__ = ["Migrated", "migrate", "on_old_rank"]
