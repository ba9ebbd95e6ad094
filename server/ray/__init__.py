"""Flower's Grid on Ray: grid.py sends, worker_pool.py starts actors, worker.py is an actor."""
