"""Classes with the constructors that scripts call. They translate: each passes what its arguments say to a class of the
rooms below, and holds nothing. Only here may a constructor take arguments that nothing reads."""
