"""dlo_lib: the library behind the labs of the course *optimised and distributed deep learning*."""

__version__ = "0.1.0"
