import torch

from wordrun.train.metrics import MetricOfSums


class R2(MetricOfSums):  # its options are self.options
    def sums(self, outputs, batch):
        y, error = batch.targets.double(), batch.targets.double() - outputs.double()
        return torch.stack([torch.ones_like(y), y, y.square(), error.square()], 1)

    def compute(self, sums):
        n, y, y_squared, squared_error = sums
        return 1 - squared_error / (y_squared - y.square() / n)
