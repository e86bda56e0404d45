"""What the checks, the figures and the cells of several labs need: each thing is here once.

Here: comparison with twins and with known mistakes, traffic, memory and the order of calls of a run, the
style of figures, and what a cell shows of a job. A student's copy has it; it holds no answer of any lab.
Imports ``grading.checks`` and the library.
"""
