"""The benchmark of credit methods: what a method finds, gains in a step and in training, and costs."""
