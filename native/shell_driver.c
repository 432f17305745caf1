/* What a shell session runs: `SHELL -c DRIVER`. It works in bash, dash, busybox sh and what resembles them, and is one
 * line, so that the line numbers in a shell's messages are those of the command.
 *
 * A line on descriptor 9 says that the traps are set. 8 brings "BYTES LINES\n" and a command of as many bytes and lines;
 * its exit status goes to 9. In bash they move to 62 and 63, out of the way of commands that use one digit; other shells
 * know no more than one. They are closed while a command runs, by a redirection of eval alone, so that redirections that
 * it makes for good stay.
 *
 * A command runs by `command eval`: a syntax error does not end the shell then, nor do most errors in dash. It sees the
 * status of the command before as $? (in the `else` part of `if f` it is that of f, and no trap of the caller's fires).
 * Options that would show or export what is ours (-a -v -x) are off meanwhile. Under -e the status of `eval` itself would
 * end the shell even where `false && true` does not: the command sets __barchan_e and eval succeeds; not with a
 * here-document, which may not be closed.
 *
 * Signal 64 gives the rest of a command up. In bash the trap for DEBUG fails then before all that does not name __barchan,
 * which skips it (extdebug), and leaves every loop (`break 0` does, and fails). In the other shells an error does it that
 * `command eval` catches. The traps do nothing while no command runs. A trap for SIGINT keeps bash from ending itself when
 * $(…) is interrupted. */
#include "shell.h"

#define RUN(R, W) "command eval \"$__barchan_o$__barchan_t\" " R "<&- " W ">&-;"
#define HIDE(LETTER) \
    "case $-__barchan in *" LETTER "*__barchan)set +" LETTER ";__barchan_o=" LETTER "$__barchan_o;;esac;"
#define LOOP(R, W, READ, DISARM)                                                                                        \
    "while { __barchan_s=$?;"                                                                                           \
    "case $-__barchan in *a*__barchan)set +a ${__barchan_z-};"                                                          \
    "__barchan_o=a __barchan_t=$__barchan_s __barchan_x=$__barchan_e __barchan_n=$__barchan_d;"                         \
    "unset __barchan_s __barchan_e __barchan_d;"                                                                        \
    "__barchan_s=$__barchan_t __barchan_e=$__barchan_x __barchan_d=$__barchan_n;;*)__barchan_o=;;esac;"                 \
    DISARM                                                                                                              \
    HIDE("x") HIDE("v")                                                                                                 \
    "__barchan_o=${__barchan_o:+\"set -$__barchan_o;\"};"                                                               \
    "case $__barchan_on in 1)__barchan_on=0;echo \"${__barchan_e:-$__barchan_s}\">&" W ";;esac;"                        \
    "IFS=\" \" read -r __barchan_n __barchan_l <&" R "||exit;" READ                                                     \
    "case $__barchan_t in *\"<<\"*)__barchan_n=;;*\"set -\"*)__barchan_n=1;;"                                           \
    "*)case $- in *e*)__barchan_n=1;;*)__barchan_n=;;esac;;esac;"                                                       \
    "__barchan_t=$__barchan_t${__barchan_n:+\"$__barchan_w\"\"__barchan_e=\\$?\"};"                                     \
    "__barchan_s=${__barchan_e:-$__barchan_s} __barchan_e=;} 2>&-;"                                                     \
    "do for __barchan_i in 1;do if __barchan_f \"$__barchan_s\";then " RUN(R, W) "else " RUN(R, W) "fi;done;done"

#define READ_BYTES "LC_ALL=C IFS= read -r -N \"$__barchan_n\" __barchan_t <&62;"
/* By hundreds: a long text that grows line by line is copied each time. */
#define READ_LINES                                                                                                      \
    "__barchan_t= __barchan_n=;while [ \"$__barchan_l\" -gt 0 ];do IFS= read -r __barchan_x <&8||exit;"                 \
    "__barchan_n=$__barchan_n$__barchan_x$__barchan_w;__barchan_l=$((__barchan_l-1));"                                  \
    "case $__barchan_l in *00)__barchan_t=$__barchan_t$__barchan_n __barchan_n=;;esac;done;"                            \
    "__barchan_t=$__barchan_t$__barchan_n;"

#define BASH_TRAP                                                                                                       \
    "case $__barchan_on$__barchan_d in 10)__barchan_e=130 __barchan_d=1;set -T;shopt -s extdebug;"                      \
    "trap \"[[ \\$BASH_COMMAND == *__barchan* ]] || { break 0;false;} 2>&-\" DEBUG;;esac"
#define BASH_DISARM                                                                                                     \
    "case $__barchan_d in 1)trap - ${__barchan_z-DEBUG};shopt -u ${__barchan_z-extdebug};set +T ${__barchan_z-};"       \
    "__barchan_d=0;;esac;"
#define OTHER_TRAP "case $__barchan_on in 1)__barchan_e=130;{ : \"${__barchan_z?}\";} 2>&-;;esac"

const char shell_driver[] =
    "__barchan_w=${IFS#??} __barchan_e= __barchan_on=0 __barchan_d=0;"
    "__barchan_f(){ __barchan_on=1;return \"$1\";};"
    "__barchan_m='while : ${__barchan_z-};do command eval \"$__barchan_p\";done;eval \"$__barchan_m\"';"
    "trap : INT;"
    "if [ \"${BASH_VERSION+1}\" ];then trap '" BASH_TRAP "' 64;echo 0 >&9;eval 'exec 62<&8 63>&9';exec 8<&- 9>&-;"
    "__barchan_p='" LOOP("62", "63", READ_BYTES, BASH_DISARM) "';"
    "else trap '" OTHER_TRAP "' 64;echo 0 >&9;__barchan_p='" LOOP("8", "9", READ_LINES, "") "';fi;"
    "eval \"$__barchan_m\"";
