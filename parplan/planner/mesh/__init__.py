"""Plans of repeated blocks on many devices, counted instead of laid out: stages x data parallel x tensor groups."""
