"""What the site is made with: formulas, drawings, tables, and what holds it to what it says."""
