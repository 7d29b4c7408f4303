"""The verbs under `forerun bench`, in folders by what is measured; `report` is what all of them
write.

It uses the engine from outside, and only the command line and `forerun tune` import it.
"""
