"""Results for others: packs, verification, leaderboards."""
