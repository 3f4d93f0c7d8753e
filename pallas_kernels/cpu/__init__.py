"""C++ kernels for CPUs, compiled on the user's machine (`build`); without them, XLA runs."""
