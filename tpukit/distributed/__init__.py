"""One function on every core: laid out, forked, watched, and told well when it fails."""
