"""What the course is about: each technique as PyTorch code that is read in minutes.

The nouns that techniques share stand here (facts of a model, bucket plans, arrivals,
what is in flight, groups), the techniques themselves in the folders beside them.
"""
