"""`forerun check`: evidence, on the user's own model and machine, that speculation does not change
what is said.

Part by part: the code of the rules on toy models by exact enumeration (`rules`), the target's
passes bit by bit (`passes`), texts token for token (`texts`), the law of sampled tokens by a
sequential test (`law`), and faults put in on purpose, which all of that must catch (`faults`).
`certificate` runs them and adds up."""
