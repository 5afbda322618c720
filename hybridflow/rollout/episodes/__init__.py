"""Episodes: several turns of the policy and its environment, whose tokens are one sample."""
