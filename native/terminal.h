/* Pseudo-terminals of the sandbox's own devpts, which is held from before anything of the sandbox runs: what its /dev
 * holds later does not matter. */
#ifndef BARCHAN_TERMINAL_H
#define BARCHAN_TERMINAL_H
#include "identity.h"

#include <stdbool.h>
#include <stdint.h>

/* Once, at start. Without a devpts every terminal fails with ENODEV. */
void terminal_init(void);
/* The master, of a terminal owned by `who` with mode 0620, and its slave; both close-on-exec. -1 with errno. */
int terminal_open(const struct identity *who, uint16_t rows, uint16_t columns, int *slave);
/* The foreground group gets SIGWINCH when the size changed. */
void terminal_resize(int master, uint16_t rows, uint16_t columns);
/* Types the terminal's end-of-file character if it has one now; once more after a line that is not whole. False: no room now. */
bool terminal_end_input(int master, bool line_open);
#endif
