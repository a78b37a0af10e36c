"""Vector environments with Gymnasium's interface."""
