"""A graph for each length."""

QUESTION = "quiz"
LOSES = 1
FAILS = "quiz_q4"
SAYS = "the next graph leaves it open"

quiz = {"q1": "b", "q2": "a", "q3": "d", "q4": "d", "q5": "a", "q6": "b", "q7": "d", "q8": "b"}
