"""The recipe on one transactional id and on several: what a writer does between begin and commit."""
