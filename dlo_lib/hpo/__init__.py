"""Hyperparameter search: what Optuna lacks or the course teaches, on its studies and its storage."""
