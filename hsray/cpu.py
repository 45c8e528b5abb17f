"""PyTorch on a CPU: all its cores, and from each process the same bits.

A shard that is captured again, by another process, must be the same file.
"""

import os

#: What PyTorch may hand to oneMKL's vector math library, of one tensor.
VECTOR_MATH = ("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10")
VECTOR_MATH += ("log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc")


def use_all_cores() -> None:
    """Lets PyTorch compute in as many threads as this process may use cores, if it has no GPU.

    Ray sets one thread for each CPU that an actor reserves. MKL may take fewer than it is told, by what each process makes of
    the machine (oneMKL Developer Guide, MKL_DYNAMIC), and the last bits of a product depend on their number.
    """
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def settle_vector_math() -> None:
    """Makes the first call of each function of oneMKL's vector math library, in this thread, on one number.

    oneMKL 2024.2, which is in PyTorch's wheels, chooses a function's kernel when it is first called. Where several threads
    make that call together, one may compute its part with a kernel of low accuracy (PyTorch's issue 188792). Of about 500
    processes on a Xeon two gave a prompt whose states were off by 2e-5 behind the first attention, in all tokens but the
    first, whose rotation is by nothing: what sines of low accuracy would do.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_MATH:
            getattr(torch, name)(one)
