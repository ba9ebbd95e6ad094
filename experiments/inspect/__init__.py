"""Looking at runs, finished or not: curves in a terminal, cards, lists, pages."""
