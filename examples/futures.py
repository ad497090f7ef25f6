"""A search for the best learning rate with mpi4py.futures: one rank hands out tasks, the others work on them.

    launch -n 3 python examples/futures.py

ALCF's workshop names mpi4py beside torch.distributed. Compared with one process, MPICommExecutor replaces an executor
of concurrent.futures. Rank 0 leaves the `with` block when all tasks are done. The other ranks work inside the `with`
statement until then, and get None. A program with an MPIPoolExecutor runs unchanged under
`launch -n 3 python -m mpi4py.futures FILE`.
"""

from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier


def accuracy(learning_rate):
    """Train a linear classifier for handwritten digits; return its accuracy and the rank that did it."""
    images, labels = load_digits(return_X_y=True)
    model = SGDClassifier(learning_rate="constant", eta0=learning_rate, max_iter=20, tol=None, random_state=0)
    model.fit(images[:1536], labels[:1536])
    return model.score(images[1536:], labels[1536:]), MPI.COMM_WORLD.rank


def main():
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:
            return
        rates = [10.0**exponent for exponent in range(-6, 2)]
        results = list(executor.map(accuracy, rates))
    for rate, (score, rank) in zip(rates, results, strict=True):
        print(f"learning rate {rate:g}: accuracy {score:.3f}, by rank {rank}")
    best = max(range(len(rates)), key=lambda number: results[number])
    print(f"best of {MPI.COMM_WORLD.size} ranks: learning rate {rates[best]:g}")


if __name__ == "__main__":
    main()
