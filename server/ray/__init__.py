"""A Flower Grid on Ray: `grid` sends messages, `worker_pool` starts actors of `worker`."""
