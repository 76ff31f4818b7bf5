"""Checks before a job: `facts` reads them, `peers` exchanges them, `checks` judges them."""
