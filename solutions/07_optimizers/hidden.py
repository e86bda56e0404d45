"""The right answers of the quiz; the visible checks run again with the seed of the class. Never released."""

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer("a", "Adam divides gradient and decay by the size of the gradients, which is large here"),
    "q2": Answer("b", "Lion keeps one average for each weight, AdamW two"),
    "q3": Answer("d", "U S V^T becomes U V^T: the directions stay, their lengths become equal"),
    "q4": Answer("b", "it is element by element; LARS and LAMB need norms of layers, Muon whole matrices"),
    "q5": Answer("c", "of six, the best pair is above 3 by chance in 17 % of all cases; 5 % is at 3.9"),
}
