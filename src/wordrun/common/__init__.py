"""What every layer may use; nothing here imports another part of wordrun, torch or Hydra."""
