"""A run's folder: locks, atomic files, resumable records, progress. No torch."""
