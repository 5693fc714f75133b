"""The recipe of a dual write: what a writer does between begin and commit, on one transactional id or several."""
