"""Scripts that build the documentation site.

They make formulas, drawings and tables, and check the pages.
"""
