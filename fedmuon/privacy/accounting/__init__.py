"""Privacy accounting: dominating pairs, privacy loss, epsilon, noise calibration, and tuning."""
