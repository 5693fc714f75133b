"""`manage.py dualwrite` and `manage.py dualwrite_consume`."""
