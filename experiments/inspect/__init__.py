"""Views of finished and unfinished runs: curves in a terminal, cards, lists and pages."""
