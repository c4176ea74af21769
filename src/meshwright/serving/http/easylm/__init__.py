"""The endpoints of EasyLM's and LWM's servers: generation, chat turns and log likelihoods."""
