"""Pure tensor functions: log-probs, advantages, KL, masking, losses, noise. No model, no state."""
