"""What every layer may use; nothing here imports other packages of wordrun, torch or Hydra."""
