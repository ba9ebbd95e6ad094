"""Privacy accounting: dominating pairs, privacy loss, epsilon, calibration, tuning."""
