"""Plans taken away: as programs for other tools."""
