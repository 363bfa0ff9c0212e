"""Where committed output goes: one file per kind. Each says how it avoids duplicates."""
