"""One function on every core: launched, watched, and its first failure explained."""
