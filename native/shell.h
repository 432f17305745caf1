/* Shell sessions: an EXEC whose program is a shell that the guest drives, and RUN, one command line in it. */
#ifndef BARCHAN_SHELL_H
#define BARCHAN_SHELL_H
#include "sessions.h"

/* The shell's ends of the two pipes. */
#define SHELL_COMMANDS_FD 8
#define SHELL_REPORTS_FD 9
#define SHELL_SIGNAL 64 /* gives up the rest of a command */

extern const char shell_driver[];

struct shell;

/* The session's state; NULL without memory. Takes nothing yet. */
struct shell *shell_new(struct session *session);
/* Our ends of the pipes: commands for writing, reports for reading, the shell's output (`err` -1: none of its own). */
void shell_attach(struct shell *shell, int commands, int reports, int out, int err);
/* The shell ended. True once the command that it ran is over, too, and everything is given back. */
bool shell_over(struct shell *shell);
/* It never began. */
void shell_abandon(struct shell *shell);

/* RUN */
void run_start(struct op *op, const struct request *request);
#endif
