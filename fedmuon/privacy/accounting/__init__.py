"""What private runs spend: dominating pairs, privacy loss, epsilon, calibration, tuning."""
