"""The collective tracer: every communication call of this process, and when it was issued and waited for.

Holds the tap in torch's dispatcher and in its waiting functions, the listeners that share the tap, the
lifetime of the process group, the recorder that fills a trace, the trace with its questions, and its
timeline. A trace can be read without torch. Imports ``comm.calls``; ``comm.deadlock`` imports this room.
"""
