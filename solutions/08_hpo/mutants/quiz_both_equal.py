"""No difference seen is taken for no difference."""

QUESTION = "quiz"
LOSES = 1
FAILS = "quiz_q5"
SAYS = "the sign cannot be told"


quiz = {"q1": "b", "q2": "a", "q3": "c", "q4": "d", "q5": "c"}
