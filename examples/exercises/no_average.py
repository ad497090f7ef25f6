import os

from by_hand import train
from torch.nn.utils import parameters_to_vector

model = train(average=lambda model: None)
total = float(parameters_to_vector(model.parameters()).sum())
print(f"rank {os.environ['RANK']}: the weights sum to {total:.4f}", flush=True)
