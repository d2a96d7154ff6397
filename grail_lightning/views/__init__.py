"""Views of rollouts and their credit, as pictures. Text from a model is shown, never interpreted."""
