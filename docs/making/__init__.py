"""Build steps of the site: formulas, drawings, tables, and checks of the pages."""
